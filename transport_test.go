package rdmanet

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"reflect"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/internal/defect"
)

// transport is rdmanet or net's TCP, so that one test can hold them against
// each other: what is asked of rdmanet is what TCP does.
type transport struct {
	name, network, address string
	rdma                   bool
}

var transports = []transport{
	{"rdma4", "rdma4", local4, true},
	{"rdma6", "rdma6", local6, true},
	{"tcp4", "tcp4", local4, false},
	{"tcp6", "tcp6", local6, false},
}

func (tr transport) listen(network, address string) (net.Listener, error) {
	if tr.rdma {
		return Listen(network, address)
	}
	return net.Listen(network, address)
}

func (tr transport) dial(network, address string) (net.Conn, error) {
	if tr.rdma {
		return Dial(network, address)
	}
	return net.Dial(network, address)
}

// stream is what *net.TCPConn and *Conn both are.
type stream interface {
	net.Conn
	io.ReaderFrom
	io.WriterTo
	CloseRead() error
	CloseWrite() error
}

var (
	_ stream = (*net.TCPConn)(nil)
	_ stream = (*Conn)(nil)
)

// pair makes a connection that is closed with the test.
func (tr transport) pair(t testing.TB) (client, server stream) {
	t.Helper()
	ln, err := tr.listen(tr.network, tr.address)
	require.NoError(t, err)
	defer ln.Close()
	type accepted struct {
		c   net.Conn
		err error
	}
	ch := make(chan accepted, 1)
	go func() {
		c, err := ln.Accept()
		ch <- accepted{c, err}
	}()
	c, err := tr.dial(tr.network, ln.Addr().String())
	require.NoError(t, err)
	a := <-ch
	require.NoError(t, a.err)
	t.Cleanup(func() {
		c.Close()
		a.c.Close()
	})
	return c.(stream), a.c.(stream)
}

// eachTransport runs f over rdmanet and over TCP.
func eachTransport(t *testing.T, f func(t *testing.T, tr transport)) {
	for _, tr := range transports {
		t.Run(tr.name, func(t *testing.T) {
			checkLeaks(t)
			f(t, tr)
		})
	}
}

// pipeOn makes a connected pair with one configuration.
func pipeOn(t testing.TB, cfg Config) (client, server *Conn) {
	t.Helper()
	return pipe(t, "rdma4", local4, &ListenConfig{Config: cfg}, &Dialer{Config: cfg})
}

// exchange sends n bytes each way at once and checks them.
func exchange(t testing.TB, a, b net.Conn, n int) {
	t.Helper()
	require.NoError(t, exchanged(t, a, b, n))
}

// exchanged is exchange for a connection that may break.
func exchanged(t testing.TB, a, b net.Conn, n int) error {
	t.Helper()
	data := [2][]byte{pattern(3, n), pattern(4, n)}
	errs := make(chan error, 4)
	for i, c := range []net.Conn{a, b} {
		go func() {
			_, err := c.Write(data[i])
			errs <- err
		}()
		go func() {
			if err := defect.ReadFull(c, data[1-i]); err != nil {
				errs <- fmt.Errorf("end %d: %w", i, err)
				return
			}
			errs <- nil
		}()
	}
	var err error
	within(t, "exchange", func() {
		for range 4 {
			err = errors.Join(err, <-errs)
		}
	})
	return err
}

// requireOpError checks the shape of an error, as net's own tests do: what it
// is about is said in full, once, and no address is a typed nil.
func requireOpError(t testing.TB, tr transport, err error, op string) *net.OpError {
	t.Helper()
	require.Error(t, err)
	oe, ok := err.(*net.OpError)
	require.True(t, ok, "%T is not a *net.OpError: %v", err, err)
	require.Equal(t, op, oe.Op)
	if tr.rdma {
		require.Equal(t, "rdma", oe.Net)
	}
	for _, a := range []net.Addr{oe.Source, oe.Addr} {
		require.False(t, a != nil && reflect.ValueOf(a).IsNil(), "a typed nil among the addresses")
	}
	require.Error(t, oe.Err)
	var inner *net.OpError
	require.False(t, errors.As(oe.Err, &inner), "wrapped twice: %v", err)
	return oe
}

// requireConnError is requireOpError with both addresses there.
func requireConnError(t testing.TB, tr transport, err error, op string) {
	t.Helper()
	oe := requireOpError(t, tr, err, op)
	require.IsType(t, (*net.TCPAddr)(nil), oe.Source)
	require.IsType(t, (*net.TCPAddr)(nil), oe.Addr)
}

// requireTimeout checks that an error is a deadline's.
func requireTimeout(t testing.TB, err error) {
	t.Helper()
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
	var ne net.Error
	require.ErrorAs(t, err, &ne)
	require.True(t, ne.Timeout())
}
