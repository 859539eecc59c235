"""Memory and traffic of a training step, by arithmetic: nothing is allocated and nobody is asked."""
