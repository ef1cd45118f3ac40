module github.com/rdmanet/rdmanet

go 1.26
