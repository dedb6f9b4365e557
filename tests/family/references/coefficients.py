"""The sets of coefficients, one matrix at a time through its SVD."""

import torch

from muonsw.orthogonalize import COEFFICIENT_SETS

EXPRESS = [(8.28721201814563, -23.595886519098837, 17.300387312530933)]
EXPRESS += [(4.107059111542203, -2.9478499167379106, 0.5448431082926601)]
EXPRESS += [(3.9486908534822946, -2.908902115962949, 0.5518191394370137)]
EXPRESS += [(3.3184196573706015, -2.488488024314874, 0.51004894012372)]
EXPRESS += [(2.300652019954817, -1.6689039845747493, 0.4188073119525673)]
EXPRESS += [(1.891301407787398, -1.2679958271945868, 0.37680408948524835)]
EXPRESS += [(1.8750014808534479, -1.2500016453999487, 0.3750001645474248)]
SAFE = [(a / 1.01, b / 1.01**3, c / 1.01**5) for a, b, c in EXPRESS]
YOU = [(4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037)]
YOU += [(2.8769, -3.1427, 1.2046), (2.8366, -3.0525, 1.2012)]
FIVE = [(8.156554524902461, -22.48329292557795, 15.878769915207462)]
FIVE += [(4.042929935166739, -2.808917465908714, 0.5000178451051316)]
FIVE += [(3.8916678022926607, -2.772484153217685, 0.5060648178503393)]
FIVE += [(3.285753657755655, -2.3681294933425376, 0.46449024233003106)]
FIVE += [(2.3465413258596377, -1.7097828382687081, 0.42323551169305323)]

# Copied from their authors: by what the Frobenius norm is multiplied before it divides, the polynomials, the number of
# steps. A set without a copy here is computed with the library's own numbers.
SETS = {
    "newton_schulz": (1.0, [(3.4445, -4.7750, 2.0315)], 5),
    "newton_schulz_you": (1.0, YOU, 5),
    "polar_express": (1.01, [*SAFE, (1.875, -1.25, 0.375)], 5),
    "polar_express_5": (1.02, FIVE, 5),
    "polar_express_nanochat": (1.01, FIVE, 5),
    "simple_quintic": (1.0, [(2.0, -1.5, 0.5)], 12),
}


def orthogonalize(name, M, steps=None):
    entry = COEFFICIENT_SETS[name]
    divisor, polynomials, default = SETS.get(name, (entry.divisor, entry.polynomials, entry.steps))
    U, S, Vh = torch.linalg.svd(M.double(), full_matrices=False)
    s = S / (divisor * S.norm()) if S.norm() > 0 else S
    for k in range(steps or default):
        a, b, c = polynomials[min(k, len(polynomials) - 1)]
        s = a * s + b * s**3 + c * s**5
    return torch.mm(U * s, Vh)
