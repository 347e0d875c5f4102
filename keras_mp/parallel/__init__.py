"""One script on several devices of a host: `distribute`, and the layouts behind it."""
