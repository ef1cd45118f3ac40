module github.com/rdmanet/rdmanet

go 1.26.0

require (
	github.com/hashicorp/yamux v0.1.2
	github.com/stretchr/testify v1.12.1
	golang.org/x/net v0.62.0
	golang.org/x/sys v0.49.0
)

require go.yaml.in/yaml/v3 v3.0.5 // indirect
