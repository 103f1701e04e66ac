"""Records to totals: drains rings, counts operations and steps, joins the ranks of a collective."""
