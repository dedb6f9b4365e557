"""Documents that a small model can learn: a Markov chain over 16 letters."""

import json
import random
from itertools import islice
from string import ascii_lowercase


def markov_texts(seed):
    """Endless random documents, 512 characters long on average."""
    chosen, letters = random.Random(seed), ascii_lowercase[:16]
    # Squares, because some transitions are to be far more frequent than others.
    weights = {letter: [chosen.expovariate(1.0) ** 2 for _ in letters] for letter in letters}
    while True:
        text = chosen.choice(letters)
        while chosen.random() > 1 / 512:
            text += chosen.choices(letters, weights[text[-1]])[0]
        yield text


def write_texts(path, documents, seed=0):
    """Write documents of the chain as JSON lines."""
    lines = (json.dumps({"text": text}) + "\n" for text in islice(markov_texts(seed), documents))
    path.write_text("".join(lines), encoding="utf-8")
    return path
