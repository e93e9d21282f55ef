"""Good choices fast, without a bound: local search, large neighbourhoods, elimination of most nodes."""
