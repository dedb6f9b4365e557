"""Options and float64 reference of every member of the family."""

from functools import partial

from tests.family.references import AdaMuon, Adapted, Equalized, Muon2, NorMuon, Signs, Snapped, SoapMuon

# Options of MuonSW, and the class of the reference.
MEMBERS = {
    "normuon": ({"normalize": "normuon"}, NorMuon),
    "normuon, longer axis": (
        {"normalize": "normuon", "normalize_axis": "longer", "normalize_beta2": 0.9},
        partial(NorMuon, longer=True, beta2=0.9),
    ),
    "normuon, snapped": ({"normalize": "normuon", "normalize_snap": True}, partial(NorMuon, snap=True)),
    "muon2": ({"precondition": "muon2"}, Muon2),
    "adamuon": ({"precondition": "sign", "normalize": "adamuon"}, AdaMuon),
    "sign": ({"precondition": "sign"}, Signs),
    "adamuon without sign": ({"normalize": "adamuon"}, Adapted),
    "equalize": ({"precondition": "equalize"}, Equalized),
    "soap": ({"precondition": "soap"}, SoapMuon),
    "soap, every third step": (
        {"precondition": "soap", "precondition_frequency": 3, "precondition_beta2": 0.95},
        partial(SoapMuon, period=3, beta2=0.95),
    ),
    "muon_plus": ({"normalize": "muon_plus"}, Snapped),
}
OPTIONS = {name: options for name, (options, _) in MEMBERS.items()}

# Algorithms with factors, which refresh often enough for short runs.
WITH_FACTORS = {
    "soap": {"algorithm": "soap", "precondition_frequency": 2},
    "soap, one side": {"algorithm": "soap", "precondition_frequency": 2, "precondition_max_dim": 8},
    "shampoo": {"algorithm": "shampoo", "precondition_frequency": 2, "block_size": 4},
    "shampoo, no graft": {"algorithm": "shampoo", "precondition_frequency": 3, "grafting": None, "shampoo_beta": 1.0},
    "kl_shampoo": {"algorithm": "kl_shampoo"},
    "asgo": {"algorithm": "asgo"},
}
WITH_FACTORS = {f"algorithm={name}": options for name, options in WITH_FACTORS.items()}
