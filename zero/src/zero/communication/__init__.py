"""What ranks say to each other: collectives by unit, counted, compared and explained when they fail."""
