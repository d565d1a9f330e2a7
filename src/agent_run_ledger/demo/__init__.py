"""The demo: an agent reconciles a month of invoices, is killed with SIGKILL, goes on, and the outside world is asked."""
