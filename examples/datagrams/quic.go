package main

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"sync"
	"time"

	"github.com/quic-go/quic-go"
	"github.com/rdmanet/rdmanet/examples/internal/demo"
)

const (
	protocol = "echo"
	streams  = 4
)

// serveQUIC hands the PacketConn to QUIC and sends every stream back.
func serveQUIC(p net.PacketConn) error {
	cert, err := certificate()
	if err != nil {
		return err
	}
	ln, err := quic.Listen(p, &tls.Config{Certificates: []tls.Certificate{cert}, NextProtos: []string{protocol}}, nil)
	if err != nil {
		return err
	}
	defer ln.Close()
	demo.Ready(p.LocalAddr().String())
	for {
		c, err := ln.Accept(context.Background())
		if err != nil {
			return err
		}
		go echo(c)
	}
}

func echo(c *quic.Conn) {
	for {
		s, err := c.AcceptStream(context.Background())
		if err != nil {
			return
		}
		go func() {
			defer s.Close()
			io.Copy(s, s)
		}()
	}
}

// echoQUIC hands a PacketConn of its own to QUIC.
func echoQUIC(ctx context.Context, listen demo.ListenPacketFunc, addr string, size int) (string, error) {
	p, err := listen(ctx)
	if err != nil {
		return "", err
	}
	defer p.Close()
	to, err := net.ResolveUDPAddr("udp", addr)
	if err != nil {
		return "", err
	}
	// The server's certificate was made for this run; a real client verifies.
	c, err := quic.Dial(ctx, p, to, &tls.Config{InsecureSkipVerify: true, NextProtos: []string{protocol}}, nil)
	if err != nil {
		return "", err
	}
	defer c.CloseWithError(0, "")
	start := time.Now()
	errs := make([]error, streams)
	var wg sync.WaitGroup
	for i := range streams {
		wg.Go(func() { errs[i] = echoStream(ctx, c, size) })
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		return "", err
	}
	fmt.Printf("%s each way on %d streams: %s\n", demo.Size(int64(size)), streams, demo.Rate(2*streams*int64(size), time.Since(start)))
	return "every byte came back", nil
}

// echoStream sends random bytes and compares what comes back.
func echoStream(ctx context.Context, c *quic.Conn, size int) error {
	s, err := c.OpenStreamSync(ctx)
	if err != nil {
		return err
	}
	data := make([]byte, size)
	rand.Read(data)
	written := make(chan error, 1)
	go func() {
		_, err := s.Write(data)
		written <- errors.Join(err, s.Close())
	}()
	got, err := io.ReadAll(s)
	if err := errors.Join(err, <-written); err != nil {
		return err
	}
	if !bytes.Equal(got, data) {
		return fmt.Errorf("%w: %d bytes, and %d", demo.ErrDiffers, len(got), len(data))
	}
	return nil
}

// certificate makes one that nobody has signed.
func certificate() (tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, err
	}
	template := x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, &template, &template, &key.PublicKey, key)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, err
}
