"""What an operation should take: the catalogue of links, measured references, the efficiency against them."""
