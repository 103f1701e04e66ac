"""Operations of the Python hook until their ends, and who waits for them."""
