"""From figures to inline SVG. A path's coordinates are the data, so that the page's script can read values off."""
