"""A page about runs: one HTML file from the files of run folders, or served while they train. Loads no torch.

`reading` takes what the files say, however damaged, `drawing` makes SVG of it, and the rest makes a page of that.
"""
