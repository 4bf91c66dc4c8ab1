"""From YAML files and overrides to one typed config: composing, schema, messages, differences."""
