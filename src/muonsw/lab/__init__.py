"""The lab: experiments that check the paper with the library, and the reports they write.

It needs the `lab` extra (`pip install '.[lab]'` in the clone). The library never imports it.
"""
