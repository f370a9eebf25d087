"""How one service calls another."""
