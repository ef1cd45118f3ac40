module github.com/rdmanet/rdmanet/examples/rdmadump

go 1.26.0

replace github.com/rdmanet/rdmanet => ../..

require (
	github.com/gopacket/gopacket v1.7.7
	github.com/rdmanet/rdmanet v0.0.0
	golang.org/x/term v0.47.0
)

require (
	golang.org/x/net v0.62.0 // indirect
	golang.org/x/sys v0.49.0 // indirect
)
