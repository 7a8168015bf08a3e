"""Folders on disks and in object stores: all other packages read and write through `schemas.storage.folder`."""
