"""Numbers: sums over the part tree and its trace. Nothing here knows a card or a torch tensor."""
