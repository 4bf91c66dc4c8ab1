"""Drawings as inline SVG. The coordinates of a path are the data, so that the page's script can read values off."""
