"""The one place that concludes what is wrong: conditions by a list of rules, incidents with begin, end and cause."""
