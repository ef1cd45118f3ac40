package rdmanet

import (
	"errors"
	"io"
	"net"
	"testing"

	"github.com/rdmanet/rdmanet/internal/regmem"
)

// blockedWriter takes nothing until it is let go.
type blockedWriter struct{ entered, release chan struct{} }

func (w *blockedWriter) Write(p []byte) (int, error) {
	close(w.entered)
	<-w.release
	sum := 0
	for _, b := range p { // the memory must still be there
		sum += int(b)
	}
	if sum != len(p) {
		return 0, errors.New("the bytes have changed")
	}
	return len(p), nil
}

// Close does not wait for the writer that WriteTo feeds, and leaves it the
// bytes it has been given.
func TestCloseDuringWriteTo(t *testing.T) {
	client, server := pipe(t, "rdma", local4, new(ListenConfig), new(Dialer))
	p := make([]byte, 100_000)
	if regmem.PinsMemory(testDevice(t)) {
		p = p[:20_000] // what the first receives have room for
	}
	for i := range p {
		p[i] = 1
	}
	if _, err := client.Write(p); err != nil {
		t.Fatal(err)
	}
	w := &blockedWriter{make(chan struct{}), make(chan struct{})}
	result := make(chan error, 1)
	go func() {
		_, err := server.WriteTo(w)
		result <- err
	}()
	<-w.entered
	if err := server.Close(); err != nil {
		t.Error(err)
	}
	if err := client.Close(); err != nil {
		t.Error(err)
	}
	close(w.release)
	if err := <-result; !errors.Is(err, net.ErrClosed) {
		t.Errorf("WriteTo after Close: %v, want net.ErrClosed", err)
	}
}

// writerOf is a function as an io.Writer.
type writerOf func(p []byte) (int, error)

func (f writerOf) Write(p []byte) (int, error) { return f(p) }

// io.EOF of the writer is the writer's error, and not the end of the stream.
func TestWriteToWriterEOF(t *testing.T) {
	client, server := pipe(t, "rdma", local4, new(ListenConfig), new(Dialer))
	if _, err := client.Write([]byte("message")); err != nil {
		t.Fatal(err)
	}
	n, err := server.WriteTo(writerOf(func([]byte) (int, error) { return 0, io.EOF }))
	if n != 0 || err != io.EOF {
		t.Errorf("WriteTo: %d, %v, want 0, io.EOF", n, err)
	}
	closeBoth(t, client, server)
}
