"""`hfdist check MODEL`: which tasks, layouts, adapters, attention and packing a model takes."""
