"""The contracts between services: a folder per service and version, the generated code beside its .proto file."""
