"""Expected times of operations: the catalogue of links, measured references, the efficiency against them."""
