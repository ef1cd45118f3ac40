package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"fmt"
	"math/big"
	"time"
)

// selfSigned makes a key and a certificate that live as long as the process.
func selfSigned() (tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, err
	}
	template := x509.Certificate{
		SerialNumber: big.NewInt(1),
		NotBefore:    time.Now().Add(-time.Hour), // The clocks of the two machines may differ.
		NotAfter:     time.Now().Add(24 * time.Hour),
	}
	der, err := x509.CreateCertificate(rand.Reader, &template, &template, &key.PublicKey, key)
	if err != nil {
		return tls.Certificate{}, err
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, nil
}

// fingerprint is the SHA-256 of a certificate.
func fingerprint(der []byte) string {
	sum := sha256.Sum256(der)
	return hex.EncodeToString(sum[:])
}

// pinned returns a configuration that accepts only the certificate with the fingerprint
// pin.
func pinned(pin string) *tls.Config {
	return &tls.Config{
		InsecureSkipVerify: true, // VerifyConnection checks the certificate, because no authority has signed it.
		VerifyConnection: func(cs tls.ConnectionState) error {
			if got := fingerprint(cs.PeerCertificates[0].Raw); got != pin {
				return fmt.Errorf("the server's certificate is %s, not the expected %s", got, pin)
			}
			return nil
		},
	}
}
