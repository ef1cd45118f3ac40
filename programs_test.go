package rdmanet

import (
	"bytes"
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
	"net/http"
	"net/rpc"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/yamux"
	"github.com/stretchr/testify/require"
)

// Programs that know nothing but net.Conn and net.Listener.

// listenTest listens for the test's time.
func listenTest(t *testing.T) net.Listener {
	t.Helper()
	ln, err := Listen("tcp", local4)
	require.NoError(t, err)
	t.Cleanup(func() { ln.Close() })
	return ln
}

// certificate returns a server's and a client's configuration that fit.
func certificate(t *testing.T) (server, client *tls.Config) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.ParseIP(host4)}, IsCA: true, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &key.PublicKey, key)
	require.NoError(t, err)
	cert, err := x509.ParseCertificate(der)
	require.NoError(t, err)
	roots := x509.NewCertPool()
	roots.AddCert(cert)
	return &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}},
		&tls.Config{RootCAs: roots}
}

// HTTP/1.1, and HTTP/2 with TLS: many requests at once, with large bodies both
// ways.
func TestHTTP(t *testing.T) {
	for _, proto := range []string{"HTTP/1.1", "HTTP/2.0"} {
		t.Run(proto, func(t *testing.T) {
			checkLeaks(t)
			ln := listenTest(t)
			srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				body, err := io.ReadAll(r.Body)
				if err != nil {
					http.Error(w, err.Error(), http.StatusBadRequest)
					return
				}
				w.Header().Set("Protocol", r.Proto)
				w.Write(body)
			})}
			transport := &http.Transport{DialContext: DialContext}
			scheme, serve := "http", srv.Serve
			if proto == "HTTP/2.0" {
				srv.TLSConfig, transport.TLSClientConfig = certificate(t)
				transport.ForceAttemptHTTP2 = true
				scheme, serve = "https", func(l net.Listener) error { return srv.ServeTLS(l, "", "") }
			}
			served := make(chan error, 1)
			go func() { served <- serve(ln) }()
			client := http.Client{Transport: transport}
			errs := make(chan error, 8)
			for i := range cap(errs) {
				go func() {
					errs <- func() error {
						for range 5 {
							want := pattern(uint64(i), 300<<10+i)
							resp, err := client.Post(scheme+"://"+ln.Addr().String(), "", bytes.NewReader(want))
							if err != nil {
								return err
							}
							got, err := io.ReadAll(resp.Body)
							resp.Body.Close()
							if err != nil {
								return err
							}
							if p := resp.Header.Get("Protocol"); p != proto || !bytes.Equal(want, got) {
								return fmt.Errorf("%s, %d bytes for %d", p, len(got), len(want))
							}
						}
						return nil
					}()
				}()
			}
			for range cap(errs) {
				require.NoError(t, <-errs)
			}
			client.CloseIdleConnections()
			within(t, "shutdown", func() { srv.Shutdown(tctx) })
			require.ErrorIs(t, <-served, http.ErrServerClosed)
		})
	}
}

// TLS ends its stream with CloseWrite of its own, over ours.
func TestTLS(t *testing.T) {
	checkLeaks(t)
	server, client := certificate(t)
	ln := tls.NewListener(listenTest(t), server)
	go func() {
		c, err := ln.Accept()
		if err != nil {
			return
		}
		io.Copy(c, c)
		c.(*tls.Conn).CloseWrite()
		c.Close()
	}()
	raw, err := Dial("tcp", ln.Addr().String())
	require.NoError(t, err)
	client.ServerName = host4
	c := tls.Client(raw, client)
	want := pattern(1, 1<<20)
	sent := make(chan error, 1)
	go func() {
		_, err := c.Write(want)
		sent <- errors.Join(err, c.CloseWrite())
	}()
	got, err := io.ReadAll(c)
	require.NoError(t, err)
	require.True(t, bytes.Equal(want, got))
	require.NoError(t, <-sent)
	require.NoError(t, c.Close())
}

// Arith is a service for net/rpc.
type Arith struct{}

// Sum adds what it is given.
func (Arith) Sum(args []int, sum *int) error {
	for _, a := range args {
		*sum += a
	}
	return nil
}

func TestRPC(t *testing.T) {
	checkLeaks(t)
	ln := listenTest(t)
	srv := rpc.NewServer()
	require.NoError(t, srv.Register(Arith{}))
	go func() {
		c, err := ln.Accept()
		if err == nil {
			srv.ServeConn(c)
		}
	}()
	c, err := Dial("tcp", ln.Addr().String())
	require.NoError(t, err)
	client := rpc.NewClient(c)
	var wg sync.WaitGroup
	for n := range 100 {
		wg.Go(func() {
			var sum int
			if err := client.Call("Arith.Sum", []int{n, n, 1}, &sum); err != nil || sum != 2*n+1 {
				t.Errorf("the sum is %d: %v", sum, err)
			}
		})
	}
	within(t, "calls", wg.Wait)
	require.NoError(t, client.Close())
}

func TestYamux(t *testing.T) {
	checkLeaks(t)
	client, server := pipe(t, "tcp", local4, new(ListenConfig), new(Dialer))
	cfg := yamux.DefaultConfig()
	cfg.LogOutput = io.Discard
	ss, err := yamux.Server(server, cfg)
	require.NoError(t, err)
	cs, err := yamux.Client(client, cfg)
	require.NoError(t, err)
	go func() {
		for {
			s, err := ss.Accept()
			if err != nil {
				return
			}
			go func() {
				io.Copy(s, s)
				s.Close()
			}()
		}
	}()
	var wg sync.WaitGroup
	for n := range 50 {
		wg.Go(func() {
			s, err := cs.OpenStream()
			if err != nil {
				t.Error(err)
				return
			}
			want := pattern(uint64(n), 100<<10)
			go s.Write(want)
			got := make([]byte, len(want))
			if _, err := io.ReadFull(s, got); err != nil || !bytes.Equal(want, got) {
				t.Errorf("stream %d: %v", n, err)
			}
			s.Close()
		})
	}
	within(t, "streams", wg.Wait)
	require.NoError(t, cs.Close())
	require.NoError(t, ss.Close())
}
