"""The page about runs: one HTML file, or a page that is served while they train. Loads no torch.

files of run folders -- reading/ --> figures -- drawing/ --> SVG -- page.py and its parts --> HTML
"""
