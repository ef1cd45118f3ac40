//go:build !unix

package twin

// mapped returns nil, because memory of files is only mapped on Unix.
func mapped(int, int) ([]byte, func()) { return nil, nil }
