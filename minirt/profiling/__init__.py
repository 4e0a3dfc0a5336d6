"""Where the time of a step goes (`Generator.profile`), and steps that no scheduler has made, to measure them."""
