"""How results are shown: one theme, figures on paper and on the page, tables in the terminal."""
