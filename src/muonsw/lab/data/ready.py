"""The names under which this was known before; see `muonsw.lab.data.prepare`."""

from muonsw.lab.data.prepare import DEFAULT_VOCAB, DataSettings, Kind, TokenizerChoice, prepare_corpus, prepare_default

__all__ = ["DEFAULT_VOCAB", "DataSettings", "Kind", "TokenizerChoice", "prepare_corpus", "prepare_default"]
