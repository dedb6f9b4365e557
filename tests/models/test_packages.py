"""Models of other packages, each with an expected table; run by `make test-models`."""

import pytest

from muonsw import MuonSW
from tests.models import packages
from tests.models.tables import differences, read_tables
from tests.models.test_idioms import routing_of

pytestmark = [
    pytest.mark.models,
    pytest.mark.skipif(bool(packages.missing()), reason="needs the extra `integrations`; run `make test-models`"),
]

CASES = [(file, name) for file in packages.BUILDERS for name in read_tables(file)]

# What routing still gets wrong, and why it cannot tell.
KNOWN_MISSES = {
    # Keys and values of a pooling that occurs once, and one projection for all layers: only their parts are read.
    ("timm", "vit_base_patch16_siglip_224"): ["attn_pool.kv.weight: head, expected hidden"],
    ("decoders", "gemma3n"): ["model.per_layer_model_projection.weight: head, expected hidden"],
    # Two projections into one space, whose outputs are compared; the second reads as many features as the first gives.
    ("encoders", "wav2vec2-pretraining"): ["project_hid.weight: hidden, expected head"],
}


@pytest.fixture(scope="module", autouse=True)
def _packages():
    packages.prepare()


@pytest.mark.filterwarnings("ignore:MuonSW.for_model found no matrix")
@pytest.mark.parametrize(("file", "name"), CASES, ids=lambda value: value)
def test_a_model_is_routed_as_its_table_says(file, name):
    """Its optimizer also accepts every shape and view, and has each parameter once."""
    model = packages.build(file, name)
    assert differences(read_tables(file)[name], routing_of(model)) == KNOWN_MISSES.get((file, name), [])
    optimizer = MuonSW.for_model(model, lr=0.02)
    claimed = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(claimed) == len(set(claimed)) == sum(p.requires_grad for p in model.parameters())


def test_the_corpus_is_as_large_as_the_documentation_says():
    assert len(CASES) == 147
