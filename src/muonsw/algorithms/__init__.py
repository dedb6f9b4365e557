"""Update rules by name; a new one is a file here and a line below."""

from __future__ import annotations

from muonsw.algorithms.adamw import ADAMW
from muonsw.algorithms.asgo import ASGO
from muonsw.algorithms.base import Algorithm as Algorithm
from muonsw.algorithms.base import Update as Update
from muonsw.algorithms.dion2 import DION2
from muonsw.algorithms.kl_shampoo import KL_SHAMPOO
from muonsw.algorithms.lion import LION
from muonsw.algorithms.muon import MUON
from muonsw.algorithms.sgd import SGD
from muonsw.algorithms.shampoo import SHAMPOO
from muonsw.algorithms.soap import SOAP
from muonsw.registry import Registry

ALGORITHMS: Registry[Algorithm] = Registry("algorithm")
ALGORITHMS.register("muon", MUON)
ALGORITHMS.register("adamw", ADAMW)
ALGORITHMS.register("sgd", SGD)
ALGORITHMS.register("lion", LION)
ALGORITHMS.register("soap", SOAP)
ALGORITHMS.register("shampoo", SHAMPOO)
ALGORITHMS.register("kl_shampoo", KL_SHAMPOO)
ALGORITHMS.register("asgo", ASGO)
ALGORITHMS.register("dion2", DION2)
