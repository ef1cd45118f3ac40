//go:build !linux || !(amd64 || arm64)

package iwarp

func sharedKinds() map[string]opener { return nil }
