module github.com/rdmanet/rdmanet/suites

go 1.26.0

require (
	github.com/rdmanet/rdmanet v0.0.0
	github.com/stretchr/testify v1.12.1
)

require (
	go.yaml.in/yaml/v3 v3.0.5 // indirect
	golang.org/x/sys v0.49.0 // indirect
)

replace github.com/rdmanet/rdmanet => ../
