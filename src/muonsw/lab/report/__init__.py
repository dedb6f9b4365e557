"""How results are shown: charts as data, an interactive page, and the same charts as PNG and SVG."""
