"""Nothing is unpickled: a pickle in the place of tensors never runs."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch

from muonsw.lab.train import checkpoint
from tests.faults.commands import refused, run_command
from tests.faults.folders import ending, folders
from tests.faults.test_damage import NEWER, digest


class Trap:
    """Leaves a file behind if anything unpickles it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize(
    "write", [torch.save, lambda trap, path: path.write_bytes(pickle.dumps(trap))], ids=["torch", ""]
)
def test_a_pickle_in_the_place_of_tensors_is_never_run(write, tmp_path):
    export, run = folders().copy("export"), folders().copy("stopped")
    write(Trap(tmp_path / "sprung"), export / "model.safetensors")
    config_file = export / "config.json"
    content = json.loads(config_file.read_text(encoding="utf-8")) | {"sha256": digest(export / "model.safetensors")}
    config_file.write_text(json.dumps(content), encoding="utf-8")
    assert "is not a whole file of tensors" in refused("sample", export)
    shutil.copyfile(export / "model.safetensors", run / NEWER / "optimizer.safetensors")
    state = json.loads((run / NEWER / "state.json").read_text(encoding="utf-8"))
    state["checksums"]["optimizer"] = content["sha256"]
    state.pop("checksum")
    (run / NEWER / "state.json").write_text(
        json.dumps({**state, "checksum": checkpoint._digest(state)}), encoding="utf-8"
    )
    assert "damaged checkpoint left out" in run_command("train", "--config", run / "config.json", "--out", run).text
    assert ending(run) == ending(folders().whole)
    assert not (tmp_path / "sprung").exists()
