"""From a model to its engine: everything is checked and drafted before anything is changed."""
