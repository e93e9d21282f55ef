"""What stages compute again instead of keep: chosen with their memory, for stages that are asked for."""
