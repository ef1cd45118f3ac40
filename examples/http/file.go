package main

import (
	"bufio"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
)

// madeName is the name of the file that the server makes if it is given no directory.
const madeName = "random.bin"

// makeFile creates a temporary directory with a file of size pseudo-random bytes, the same
// ones in every run. remove deletes both.
func makeFile(size int64) (dir string, remove func() error, err error) {
	dir, err = os.MkdirTemp("", "rdmanet-http-")
	if err != nil {
		return "", nil, err
	}
	remove = func() error { return os.RemoveAll(dir) }
	if err := writeRandom(filepath.Join(dir, madeName), size); err != nil {
		return "", nil, errors.Join(err, remove())
	}
	return dir, remove, nil
}

func writeRandom(path string, size int64) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer f.Close()
	w := bufio.NewWriterSize(f, 1<<20)
	if _, err := io.CopyN(w, rand.NewChaCha8([32]byte{}), size); err != nil {
		return err
	}
	if err := w.Flush(); err != nil {
		return err
	}
	return f.Close()
}
