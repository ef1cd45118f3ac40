module github.com/rdmanet/rdmanet

go 1.26.0

require github.com/stretchr/testify v1.12.1

require (
	github.com/hashicorp/yamux v0.1.2 // indirect
	go.yaml.in/yaml/v3 v3.0.5 // indirect
	golang.org/x/net v0.62.0 // indirect
	golang.org/x/sys v0.49.0 // indirect
)
