"""The larger commands of `muonsw`; `muonsw.lab.cli` lists all of them."""
