// Command yamux runs many streams at the same time over one connection, and checks what
// comes back on each.
package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"time"

	"github.com/hashicorp/yamux"
	"github.com/rdmanet/rdmanet/examples/internal/demo"
)

func main() {
	streams := flag.Uint("streams", 100, "client: `number` of streams")
	size := flag.Uint64("size", 256<<10, "client: `bytes` sent on each stream")
	demo.Main(demo.Program{
		Serve: serve,
		Client: func(ctx context.Context, dial demo.DialFunc, addr string) (string, error) {
			conn, err := dial(ctx, addr)
			if err != nil {
				return "", err
			}
			return exchange(conn, int(*streams), int64(*size))
		},
	})
}

// serve sends every stream's bytes back on it.
func serve(ln net.Listener) error {
	demo.Ready(ln.Addr().String())
	for {
		conn, err := ln.Accept()
		if err != nil {
			return err
		}
		go serveConn(conn)
	}
}

func serveConn(conn net.Conn) {
	session, err := yamux.Server(conn, config())
	if err != nil {
		conn.Close()
		return
	}
	defer session.Close()
	for {
		stream, err := session.AcceptStream()
		if err != nil {
			return // The client has ended the connection.
		}
		go func() {
			defer stream.Close()
			io.Copy(stream, stream)
		}()
	}
}

// exchange runs all streams over conn at the same time, and closes conn.
func exchange(conn net.Conn, streams int, size int64) (string, error) {
	session, err := yamux.Client(conn, config())
	if err != nil {
		conn.Close()
		return "", err
	}
	defer session.Close()

	start := time.Now()
	results := make(chan error)
	for i := range streams {
		go func() { results <- exchangeOne(session, i, size) }()
	}
	for range streams {
		err = errors.Join(err, <-results)
	}
	took := time.Since(start)
	total := int64(streams) * size
	return fmt.Sprintf("%d streams on one connection, %s each way in %v, %s each way, every byte as sent",
		streams, demo.Size(total), took.Round(time.Millisecond), demo.Rate(total, took)), err
}

// exchangeOne sends the content of stream i, and compares what comes back.
func exchangeOne(session *yamux.Session, i int, size int64) error {
	stream, err := session.OpenStream()
	if err != nil {
		return err
	}
	data := content(i, size)
	sent := make(chan error, 1)
	go func() {
		_, err := stream.Write(data)
		sent <- errors.Join(err, stream.Close()) // Close ends this direction only.
	}()
	got, err := io.ReadAll(stream)
	if err == nil && !bytes.Equal(got, data) {
		err = fmt.Errorf("stream %d: %w", i, demo.ErrDiffers)
	}
	return errors.Join(err, <-sent)
}

// content returns what stream i sends: size pseudo-random bytes, which no other stream
// sends.
func content(i int, size int64) []byte {
	data := make([]byte, size)
	rand.NewChaCha8([32]byte{byte(i), byte(i >> 8)}).Read(data)
	return data
}

// config turns off the log of yamux. yamux warns of every window update for a stream that
// is closed already. Failures are returned as errors anyway.
func config() *yamux.Config {
	c := yamux.DefaultConfig()
	c.LogOutput = io.Discard
	return c
}
