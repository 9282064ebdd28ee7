"""Questions about cards."""
