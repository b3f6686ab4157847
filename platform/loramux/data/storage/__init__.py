"""Adapters' files: content-addressed, in a folder or an object store, verified before they are served."""
