"""How the ranks of a job find each other, agree, and leave together."""
