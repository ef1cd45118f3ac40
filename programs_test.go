package rdmanet

import (
	"bufio"
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
	"log"
	"math/big"
	"net"
	"net/http"
	"net/rpc"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/yamux"
	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/internal/defect"
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
							if p := resp.Header.Get("Protocol"); p != proto {
								return fmt.Errorf("%s, not %s", p, proto)
							}
							if err := defect.Differ(want, got); err != nil {
								return err
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

// The ways in which HTTP ends a connection, or its own use of one, before its time.
func TestHTTPEnds(t *testing.T) {
	eachTransport(t, func(t *testing.T, tr transport) {
		ln, err := tr.listen(tr.network, tr.address)
		require.NoError(t, err)
		ended := make(chan struct{}, 100)
		mux := http.NewServeMux()
		mux.HandleFunc("/wait", func(w http.ResponseWriter, r *http.Request) {
			<-r.Context().Done()
			ended <- struct{}{}
		})
		mux.HandleFunc("/flood", func(w http.ResponseWriter, r *http.Request) {
			for b := make([]byte, 64<<10); ; {
				if _, err := w.Write(b); err != nil {
					ended <- struct{}{}
					return
				}
			}
		})
		mux.HandleFunc("/abort", func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Length", "100000")
			w.Write(make([]byte, 50000))
			panic(http.ErrAbortHandler)
		})
		mux.HandleFunc("/refuse", func(w http.ResponseWriter, r *http.Request) {
			http.Error(w, "", http.StatusRequestEntityTooLarge)
		})
		mux.HandleFunc("/hijack", func(w http.ResponseWriter, r *http.Request) {
			c, rw, err := http.NewResponseController(w).Hijack()
			if err != nil {
				return
			}
			defer c.Close()
			io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n")
			io.Copy(c, rw)
		})
		srv := &http.Server{Handler: mux, ErrorLog: log.New(io.Discard, "", 0)}
		go srv.Serve(ln)
		client := &http.Client{Transport: &http.Transport{DialContext: func(_ context.Context, network, address string) (net.Conn, error) {
			return tr.dial(network, address)
		}}}
		url := "http://" + ln.Addr().String()

		within(t, "a request that is cancelled", func() {
			for i := range 10 {
				ctx, cancel := context.WithCancel(tctx)
				time.AfterFunc(time.Duration(20+i)*time.Millisecond, cancel)
				req, err := http.NewRequestWithContext(ctx, "GET", url+"/wait", nil)
				require.NoError(t, err)
				_, err = client.Do(req)
				require.ErrorIs(t, err, context.Canceled)
			}
		})
		within(t, "a response that is cancelled", func() {
			ctx, cancel := context.WithCancel(tctx)
			req, err := http.NewRequestWithContext(ctx, "GET", url+"/flood", nil)
			require.NoError(t, err)
			resp, err := client.Do(req)
			require.NoError(t, err)
			defer resp.Body.Close()
			_, err = io.CopyN(io.Discard, resp.Body, 1<<20)
			require.NoError(t, err)
			cancel()
			_, err = io.Copy(io.Discard, resp.Body)
			require.ErrorIs(t, err, context.Canceled)
			<-ended
		})
		within(t, "a response that is broken off", func() {
			resp, err := client.Get(url + "/abort")
			require.NoError(t, err)
			defer resp.Body.Close()
			n, err := io.Copy(io.Discard, resp.Body)
			require.EqualValues(t, 50000, n)
			require.ErrorIs(t, err, io.ErrUnexpectedEOF)
		})
		within(t, "a request that is refused before its end", func() {
			resp, err := client.Post(url+"/refuse", "", io.LimitReader(rand.Reader, 64<<20))
			require.NoError(t, err)
			defer resp.Body.Close()
			require.Equal(t, http.StatusRequestEntityTooLarge, resp.StatusCode)
		})
		within(t, "a connection that is taken over", func() {
			c, err := tr.dial(tr.network, ln.Addr().String())
			require.NoError(t, err)
			defer c.Close()
			_, err = io.WriteString(c, "GET /hijack HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\nbehind the request")
			require.NoError(t, err)
			r := bufio.NewReader(c)
			resp, err := http.ReadResponse(r, nil)
			require.NoError(t, err)
			require.Equal(t, http.StatusSwitchingProtocols, resp.StatusCode)
			_, err = io.WriteString(c, ", and later")
			require.NoError(t, err)
			require.NoError(t, c.(stream).CloseWrite())
			got, err := io.ReadAll(r)
			require.NoError(t, err)
			defect.Bytes(t, "behind the request, and later", got)
		})
		client.CloseIdleConnections()
		within(t, "shutdown", func() { require.NoError(t, srv.Shutdown(tctx)) })
	})
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
	defect.Bytes(t, want, got)
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
			if err := defect.ReadFull(s, want); err != nil {
				t.Errorf("stream %d: %v", n, err)
			}
			s.Close()
		})
	}
	within(t, "streams", wg.Wait)
	require.NoError(t, cs.Close())
	require.NoError(t, ss.Close())
}
