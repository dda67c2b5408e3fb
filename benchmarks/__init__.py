"""How fast a GPT is: both styles, their peers, and the machine's limit."""
