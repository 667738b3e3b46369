"""Media items: each medium of a prompt is opened, indexed and laid out by itself; `planner` joins them."""
