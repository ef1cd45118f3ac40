package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/rdmanet/rdmanet/examples/internal/demo"
)

// fetchAll fetches the files called names, and compares the SHA-256 of each with the one
// that the server reports. The bodies are hashed and not kept.
func fetchAll(ctx context.Context, dial demo.DialFunc, addr string, names []string) (string, error) {
	c := newClient(dial, addr)
	defer c.http.CloseIdleConnections()
	for _, name := range names {
		if err := c.fetch(ctx, name); err != nil {
			return "", fmt.Errorf("%s: %w", name, err)
		}
	}
	return fmt.Sprintf("%d fetched, SHA-256 as the server states", len(names)), nil
}

// A client fetches from one server.
type client struct {
	http *http.Client
	url  string
}

// newClient returns the client for an address that the server has announced. If the address
// ends in a fingerprint, the client uses TLS.
func newClient(dial demo.DialFunc, addr string) *client {
	addr, pin, secure := strings.Cut(addr, "#")
	transport := &http.Transport{
		DialContext: func(ctx context.Context, _, addr string) (net.Conn, error) { return dial(ctx, addr) },
	}
	url := "http://" + addr
	if secure {
		transport.TLSClientConfig = pinned(pin)
		transport.ForceAttemptHTTP2 = true
		url = "https://" + addr
	}
	return &client{&http.Client{Transport: transport}, url}
}

// fetch fetches one file and prints its size, rate and SHA-256.
func (c *client) fetch(ctx context.Context, name string) error {
	start := time.Now()
	resp, err := c.get(ctx, "/files/"+name)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	h := sha256.New()
	n, err := io.CopyBuffer(h, resp.Body, make([]byte, 256<<10))
	if err != nil {
		return err
	}
	took := time.Since(start)
	sum := hex.EncodeToString(h.Sum(nil))
	fmt.Printf("%s: %s in %v over %s, %s with hashing\n%s: SHA-256 %s\n",
		name, demo.Size(n), took.Round(time.Millisecond), resp.Proto, demo.Rate(n, took), name, sum)

	stated, err := c.stated(ctx, name)
	if err != nil {
		return err
	}
	if sum != stated {
		return fmt.Errorf("SHA-256 is %s, the server states %s: %w", sum, stated, demo.ErrDiffers)
	}
	return nil
}

// stated returns the SHA-256 of one file that the server reports.
func (c *client) stated(ctx context.Context, name string) (string, error) {
	resp, err := c.get(ctx, "/sha256/"+name)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, 2*sha256.Size))
	return string(text), err
}

// get returns the response to a GET that succeeded. The caller closes its body.
func (c *client) get(ctx context.Context, path string) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.url+path, nil)
	if err != nil {
		return nil, err
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		resp.Body.Close()
		return nil, fmt.Errorf("the server says %s", resp.Status)
	}
	return resp, nil
}
