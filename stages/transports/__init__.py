"""How requests reach a worker and replies leave it: a pipe, a mailbox, an actor's methods."""
