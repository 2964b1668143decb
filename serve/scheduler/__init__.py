"""Plain Python that decides what runs next, in which batch, with how many steps."""
